(function () {
  var script = document.currentScript, figure = script && script.closest("figure");
  if (!figure) return;
  var views = figure.querySelectorAll(".wso-view"), inputs = figure.querySelectorAll("input");
  var shown = figure.querySelector(".wso-on");
  function draw() {
    var frame = 0;
    inputs.forEach(function (input) {
      var label = JSON.parse(input.dataset.labels)[+input.value];
      frame = frame * (+input.max + 1) + +input.value;
      input.setAttribute("aria-valuetext", label);
      input.closest("label").nextElementSibling.textContent = label;
    });
    var left = shown.scrollLeft;
    shown.classList.remove("wso-on");
    shown = views[frame];
    shown.classList.add("wso-on");
    shown.scrollLeft = left;
  }
  inputs.forEach(function (input) { input.addEventListener("input", draw); });
  figure.querySelector(".wso-controls").hidden = false;
  draw();
})();
